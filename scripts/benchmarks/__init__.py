"""The measurements of scripts/bench.py.

contenders     the table: sections, contenders, goals. No TensorFlow.
race, pacer    processes that take turns: the one that measures, and those measured
results        figures, verdicts, the printed table. No TensorFlow.
nets           the data and the nets that all contenders share
by_hand, ours, others, recipes, commands
               the functions that contenders run in processes of their own
"""
