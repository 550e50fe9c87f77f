"""The measurements of scripts/bench.py, a file for each subject.

results, table, picture   figures, goals and verdicts; plain text; PNG. No TensorFlow.
machine                   where it was measured
race, pacer               processes that take turns, window by window: the one that measures, and those measured
cold, cold_loop           whole processes, one after another; the loop by hand as one of them
samples, nets             the data, and the nets, that all contenders share
by_hand, ours, others, torch_lightning
                          the contenders, as functions that a process of its own runs
recipes                   optimizers, micro-batches, averages and a GAN, by hand and ours
saves                     saves, resumes and seeks of a large model, likewise
subjects, growth          what is raced against what, and the goals
"""
