"""What `trainer-kit render` writes: a job described once, and one module for each system that runs it."""
