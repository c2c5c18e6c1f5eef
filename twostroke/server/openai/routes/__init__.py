"""The endpoints: generating text, listing models, and turning text into tokens and back."""
