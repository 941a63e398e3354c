"""What is usual for a series of numbers, and what is not: spikes, drift, a falling loss scale."""
