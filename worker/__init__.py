"""The worker of paged: one device. Turns a step into tensors, runs the model over the pages, samples."""
