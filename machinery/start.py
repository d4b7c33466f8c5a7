"""How a run begins: supervised start, self-check, spread of rewards, checkpoint to go on from."""

import json
from dataclasses import replace

import torch
from tqdm import tqdm

from machinery.load import check_branching, check_gradient, self_check
from machinery.rollout import Messages, choose_prompts, step_seed
from machinery.run import Gold, Run, new_folder, write_whole
from machinery.sft import sft


def start(
    learner: object,
    prompts: list[Messages],
    gold: Gold | None,
    examples: list[tuple[Messages, str]] | None,
) -> Run:
    """Open the run folder, and bring the policy to where RL starts, or a resumed run goes on."""
    config = learner.config
    folder = config.resume or config.output_dir or new_folder(config)
    run = Run(replace(config, output_dir=folder), learner, gold)
    if (run.folder / "start").exists():
        run.load("start")
    elif examples:
        sft(
            learner.policy,
            learner.tokenizer,
            examples,
            learner.vocabulary,
            micro_batch=config.micro_batch,
            max_tokens=config.max_prompt_tokens + config.max_response_tokens,
            learning_rate=config.sft_learning_rate,
            seed=config.seed,
            **config.template,
        )
        run.save("start", optimizer=False)
    learner.mark_start()
    torch.manual_seed(config.seed)
    run.checks = self_check(learner.policy, learner.tokenizer, learner.vocabulary, prompts, config)
    if learner.reads_gradient or learner.branches:
        few = learner.sample(prompts[:1])
    if learner.reads_gradient:
        check_gradient(learner.reward_model, few)
    if learner.branches:
        check_branching(learner.reward_model, few)
    if config.length_penalty or config.advantage_std_floor:
        saved = run.folder / "sigma0.json"  # a resumed run must not measure another
        if not saved.exists():
            write_whole(saved, json.dumps(starting_std(learner, prompts)))
        learner.sigma = json.loads(saved.read_text())
    if config.resume:
        run.resume()
    learner.policy.train()
    return run


def starting_std(learner: object, prompts: list[Messages], count: int = 128) -> float:
    """σ0: the median over `count` prompts of the raw reward's standard deviation in a group. [dev]

    Under the policy that RL starts from, on other prompts than the first rollouts'.
    """
    config = learner.config
    seed = config.seed + 1_000
    size = config.prompts_per_rollout
    spreads = []
    for step in tqdm(range(-(-count // size)), desc="σ0", dynamic_ncols=True):
        torch.manual_seed(step_seed(seed, step))
        rollout = learner.sample(choose_prompts(prompts, step, seed, size))
        rewards, _ = learner.reward_model.score(rollout)
        spreads.append(rewards.view(-1, config.group_size).std(-1, correction=0))
    return torch.cat(spreads).median().item()
