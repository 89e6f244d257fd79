"""What is on disk: the run folder's layout, and writing that is whole or not there."""
