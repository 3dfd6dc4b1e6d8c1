"""An engine tunes in its own start, and what it leaves behind becomes a key.

serve   its serve command with dummy weights, until it answers or ends
made    its files gathered, judged by its own rule and ours, put beside a manifest
again   the same start in the finished image: it must find its cache and tune nothing
"""
