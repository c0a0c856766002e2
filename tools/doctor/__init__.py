"""`transfer-engine doctor`: what is here, what is missing, what that costs, what to do about it."""
