"""Visualization: a FlexModel's modules and hooks (``flex.show``), and plots of hook results."""

from flex_model.visualize import html, model_map
from flex_model.visualize.plots import plot_induction_scores, plot_logit_lens, plot_patching

__all__ = ["html", "model_map", "plot_induction_scores", "plot_logit_lens", "plot_patching"]
