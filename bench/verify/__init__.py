"""`python -m bench verify`: does an answer that used the prefix cache equal one that computed everything?"""
