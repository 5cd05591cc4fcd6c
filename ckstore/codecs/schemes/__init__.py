"""Published lossy schemes, implemented after their papers."""
