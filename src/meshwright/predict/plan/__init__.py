"""The search for a layout: what is tried, what each holds and takes, and which are best."""
