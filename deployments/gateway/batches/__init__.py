"""The Batch API of the gateway: files, batches, and the lines that run at the lowest priority."""
