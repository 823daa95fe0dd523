"""The persistent matmul: operands, tiles, schedule, kernel and launch."""
