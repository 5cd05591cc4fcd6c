"""What a process that a test starts begins with where the stores of tests are in a bucket."""

from tests.places import let_paths_be_urls

let_paths_be_urls()
