"""What users read of an image: the summary on the terminal, and report.html."""
