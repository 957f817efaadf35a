"""Run a recipe's stages in order in one run directory, summarize their results, or plan them without running.

    stage                                       the contract: checks, plan, work and summary of a stage in one class
    model_stages, data_stages, training_stages, rl_stage, evaluation_stage
    model_evaluation                            scores one model: services, queue, results
    stages                                      all of them in order; `run_recipe`
    plan, render                                the dry run: `make_plan`, and its result as text or JSON
    sweep, sweep_report, shared_stages          a recipe under several settings and seeds, and their comparison
    survey, measure, memory                     what plans are made from: samples, measured rates, computed sizes

A dry run writes no run directory and no file next to the recipe: test pods, sampled texts and generated tasks are in
temporary directories, which are removed.
"""
