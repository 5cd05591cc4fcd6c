"""Reports on runs: statistics of tensors over versions, findings, and the page that shows them."""
