"""What scripts/bench.py measures, a file for each subject.

results, table, picture   figures, goals and verdicts; plain text; PNG. No TensorFlow.
race, cold, pacer         processes that take turns: forked ones, window by window; cold ones, one after another
nets                      the nets and the data that all contenders share
by_hand, ours, others     the contenders, as functions that a process of its own runs
saves                     saves, resumes and seeks of a large model
subjects, growth          what is raced against what, and the goals
"""
