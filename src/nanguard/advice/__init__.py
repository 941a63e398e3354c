"""What keeps numbers finite: configurations to start from, and a checklist."""
