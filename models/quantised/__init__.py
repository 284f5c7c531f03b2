"""Weights in the layouts of quantised checkpoints: number formats, blocks with scales, leaves."""
