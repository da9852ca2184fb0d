"""The GPU worker: queue -> engine -> store. One process, one device, one model."""
