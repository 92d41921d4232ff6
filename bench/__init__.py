"""Benchmarks: nano models, workloads, the load generator and the server it drives, over processes and HTTP only."""
