	arg	A=1
from scratch as s
arg B=2
