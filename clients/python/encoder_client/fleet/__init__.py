"""Many encoders as one: who gets which part, what is tried again where, and who is left out."""
