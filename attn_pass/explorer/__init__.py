"""An extension of Model Explorer: ``model-explorer model.pt2 --extensions=attn_pass.explorer``."""
