"""One file for each family: where its readers expect the values of a preset."""
