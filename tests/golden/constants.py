"""What the golden vectors were made with."""

N_TOKENS, N_WINDOW, KERNEL, RATIO, CHUNK = 150, 16, 5, 0.5, 64
LAG, LOCAL_CHUNK, SKETCH, SEED = 16, 46, 6, 5
REPEAT_FIRST, REPEAT_NEXT, SUFFIX = (11, 12, 13), (14, 15), (16,)
