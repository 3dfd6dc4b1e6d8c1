"""What host and image share. Standard library only; imports nothing else of this project."""
