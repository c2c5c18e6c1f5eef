"""What a deployment will take, counted from the architecture before it is bought: memory, both strokes, advice."""
