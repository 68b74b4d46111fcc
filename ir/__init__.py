"""What a program means: the graph, its ops, tracing, weight plans, the verifier and the text form."""
