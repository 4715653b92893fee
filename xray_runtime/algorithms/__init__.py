"""Pure tensor code: no Ray, no engine, no I/O.

Shapes throughout: B replies, T response tokens, N scored tokens, V vocabulary. Masks are 1 (True) where a token counts.
Losses come back as *sums* over valid tokens; the caller that steps the optimizer divides by the global count, so that
results do not depend on how a batch was split.
"""
