"""Records of activations and gradients: in the user's ``output_ptr``, or in a store on disk."""
