"""A cluster in virtual time: the product's router, scheduler and autoscaler over many cores."""
