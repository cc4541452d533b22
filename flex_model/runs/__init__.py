"""The runs of a FlexModel: one call of the model, one step of a schedule, or one batch."""
