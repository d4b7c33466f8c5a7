"""Train a policy with GRPO, and any credit method, against a frozen reward model.

    python train.py                   DATC on a tiny world, built first: minutes on a laptop
    python train.py --credit grpo     the same loop, every token's weight one
    python train.py --help            every flag

`train` is the algorithm; `Learner` below it holds the models and the passes through them. Equation
numbers are the README's. What may be skipped at first lies in machinery/, but for `Rollout` in
machinery/rollout.py: what is known of B responses of up to T tokens.
"""

from machinery.config import Config, check_config, parse, show_help

if __name__ == "__main__":
    show_help(__doc__)  # before the imports below, which take seconds

import time
from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit import FROM_THE_GRADIENT, CreditInputs, Source, get_credit_method
from grpo import (
    clipped_surrogate,
    k3_kl,
    length_window,
    response_advantages,
    response_hidden,
    response_mean,
    token_logprobs,
)
from machinery.load import prepare, settle
from machinery.rollout import (
    Messages,
    Rollout,
    choose_prompts,
    join,
    no_dropout,
    sample,
    shared_vocabulary,
    step_seed,
    to_padded,
)
from machinery.run import Gold, banner, new_folder, plain_errors, refuse_taken, report
from machinery.start import start
from reward_grad import RewardModel


def train(
    policy: PreTrainedModel,
    reward_model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Messages],
    config: Config,
    gold: Gold | None = None,
    examples: list[tuple[Messages, str]] | None = None,
) -> list[dict[str, float]]:
    """GRPO with token credit, on rollouts of B = prompts × G responses of up to T tokens.

    The policy is trained in place; `gold` (the true reward, only logged) and `examples` (answers
    to fine-tune on first) may be missing. Returns the metrics of each rollout, and writes the run
    folder. Raises ValueError for a configuration that cannot work, FloatingPointError for a reward
    or a gradient that is not finite.
    """
    learner = Learner(policy, reward_model, tokenizer, config)
    run = start(learner, prompts, gold, examples)
    for step in run.steps():
        learner.begin(step)  # seeds, empties the metrics, starts the clock

        # 1. Sample G responses per prompt. Ids and masks are made here once, never inferred again.
        chosen = choose_prompts(prompts, step, config.seed, config.prompts_per_rollout)
        rollout = learner.sample(chosen)  # ids and masks (B, T)

        # 2. Score them. Where the method reads f_t, the reward's gradient at the sampled tokens,
        #    the same pass gives it.
        rollout = learner.score(rollout)  # rewards (B,), reward_grad (B, T, D) or None

        # 3. Compare each response with the others to its prompt. (1)
        rollout = learner.compare(rollout)  # advantages (B,)
        rollout = learner.refer(rollout)  # reference_logp (B, T), for the KL of step 7

        # The credit is found once. Later epochs reuse it, and some methods compare all responses.
        if config.epochs > 1 or learner.wants_whole_batch:
            rollout = learner.credit_beforehand(rollout)

        for _ in range(config.epochs):
            micros = []
            for micro in rollout.split(config.micro_batch):
                # 4. One policy forward serves both the credit and the loss.
                hidden, logp, entropy = learner.forward(micro)  # (N, H), (b, T), (b, T)

                # 5-6. How much reward would each token's own update gain? Spread the advantage
                #      accordingly. (2)-(6) For DATC: datc.work, then credit.allocate.
                if micro.token_advantages is None:
                    micro = learner.credit(micro, hidden, logp, entropy)  # Ã, old_logp

                # 7. The clipped surrogate with one advantage per token, and a KL to the start. (7)
                learner.loss(micro, logp, entropy, len(rollout)).backward()
                micros.append(micro)
            learner.update()
        run.log(step, join(micros))
    return run.history


class Learner:
    """The models and the optimizer of a run, and the passes that `train` makes through them."""

    def __init__(
        self,
        policy: PreTrainedModel,
        reward_model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
    ):
        check_config(config)
        no_dropout(policy)
        self.policy = policy
        self.reward_model = reward_model
        self.tokenizer = tokenizer
        self.config = config
        self.vocabulary = shared_vocabulary(policy, tokenizer, reward_model.size)
        self.method = get_credit_method(config.credit)
        self.wants_whole_batch = "whole_batch" in self.method.needs
        self.reads_gradient = bool(self.method.needs & FROM_THE_GRADIENT)
        self.branches = "branch_work" in self.method.needs
        self.scores_with_gradient = self.reads_gradient and set(config.grad_at) == {1.0}
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        # As a group they may be none: eval.py also looks at policies that nobody trains.
        self.optimizer = torch.optim.AdamW(
            [{"params": self.parameters}],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self.sigma = 0.0  # σ0, the spread of rewards at the start, which two penalties count in
        self.mark_start()
        self.begin(0)

    def mark_start(self) -> None:
        """Keep the parameters as they are: the policy that RL starts from, the KL's reference."""
        self.reference = []
        if self.config.beta:
            self.reference = [p.detach().clone() for p in self.parameters]

    def begin(self, step: int) -> None:
        """Rollout number `step` begins: all its randomness comes from (seed, step)."""
        self.step_number = step
        seed = step_seed(self.config.seed, step)
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.stats: dict[str, Tensor] = defaultdict(float)
        self.lap = Laps(self.policy.device)

    @property
    def lm_head(self) -> Tensor:  # (V, H)
        return self.policy.get_output_embeddings().weight[: self.vocabulary.size]

    # -- the seven steps -----------------------------------------------------------------------

    def sample(self, prompts: list[Messages]) -> Rollout:
        """Step 1."""
        c = self.config
        rollout = sample(
            self.policy,
            self.tokenizer,
            prompts,
            self.vocabulary,
            c.group_size,
            c.max_response_tokens,
            c.temperature,
            c.sample_batch,
            **c.template,
        )
        self.lap("sample")
        return rollout

    def score(self, rollout: Rollout) -> Rollout:
        """Step 2. Sets rewards, and reward_grad where the method reads it at the sample."""
        rewards, reward_grad = self.reward_model.score(rollout, self.scores_with_gradient)
        self.lap("score")
        return replace(rollout, rewards=rewards, reward_grad=reward_grad)

    def compare(self, rollout: Rollout) -> Rollout:
        """Step 3. Sets advantages and sharpness.

        The penalties on cut, short and long responses change A, never the reward that is logged
        or differentiated.
        """
        c = self.config
        lengths = rollout.response_mask.sum(-1)  # (B,)
        cut = (~rollout.stopped).to(rollout.rewards.dtype)  # (B,)
        shaped = rollout.rewards - c.missing_eos_penalty * cut
        shaped = shaped - length_window(lengths, self.sigma * c.length_penalty)
        advantages, sharpness = response_advantages(
            c.advantage,
            shaped,
            lengths,
            rollout.group_size,
            c.max_response_tokens,
            self.sigma * c.advantage_std_floor,
        )
        return replace(rollout, advantages=advantages, sharpness=sharpness)

    def refer(self, rollout: Rollout) -> Rollout:
        """Sets the log-probs under the policy that RL started from, where there is a KL to it."""
        if not self.config.beta:
            return rollout
        return replace(rollout, reference_logp=self.reference_logp(rollout))

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Step 4. hidden (N, H) of the N response tokens, logp and entropy (B, T), 0 on padding."""
        mask = rollout.response_mask
        hidden = response_hidden(self.policy, rollout)[mask]  # (N, H)
        ids = rollout.response_ids[mask]
        logp, entropy = token_logprobs(hidden, self.lm_head, ids, self.config.temperature)
        return hidden, to_padded(logp, mask), to_padded(entropy, mask)

    @torch.no_grad()
    def credit(self, rollout: Rollout, hidden: Tensor, logp: Tensor, entropy: Tensor) -> Rollout:
        """Steps 5 and 6, from step 4's forward. Sets old_logp, token_advantages and what is logged.

        Needs no graph: the credit is a number beside the loss.
        """
        self.lap("update")
        inputs = self.evidence(rollout, hidden, logp, entropy)
        credit = self.method(inputs)
        self.lap("credit")
        return replace(
            rollout,
            old_logp=logp.detach(),
            token_advantages=credit.token_advantages,
            weights=credit.weights,
            tau=credit.tau,
            work=inputs.shown_work(),
            branches=inputs.branch_count(),
        )

    @torch.no_grad()
    def credit_beforehand(self, rollout: Rollout) -> Rollout:
        """Steps 4 to 6 for a whole rollout at once, by forwards of their own."""
        self.lap("update")
        passes = [self.forward(micro) for micro in rollout.split(self.config.micro_batch)]
        hidden, logp, entropy = map(torch.cat, zip(*passes, strict=True))
        self.lap("credit")
        return self.credit(rollout, hidden, logp, entropy)

    def loss(self, micro: Rollout, logp: Tensor, entropy: Tensor, num_responses: int) -> Tensor:
        """Step 7. The loss -J + β KL of (7) of some of `num_responses`; counts its stats."""
        c = self.config
        mask = micro.response_mask
        loss, stats = clipped_surrogate(
            logp, micro.old_logp, micro.token_advantages, mask, c.epsilon, num_responses
        )
        self.count(**stats, loss=loss, entropy=response_mean(entropy, mask, num_responses))
        if c.beta:
            kl = k3_kl(logp, micro.reference_logp, mask, num_responses)
            self.count(kl=kl)
            loss = loss + c.beta * kl
        return loss

    def update(self) -> None:
        """Step 7. Clip the gradient that the micro-batches have added up, and take the step.

        Raises FloatingPointError, before anything has changed, for a gradient that is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        if not norm.isfinite():
            raise FloatingPointError(
                f"The policy's gradient is {norm.item()} at rollout {self.step_number}. The last "
                "checkpoint is as it was; lower --learning_rate, or use --dtype float32."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.count(grad_norm=norm)
        self.lap("update")

    # -- what they use -------------------------------------------------------------------------

    def count(self, **stats: Tensor) -> None:
        """Add a micro-batch's share to the metrics; several epochs are averaged."""
        for name, value in stats.items():
            self.stats[name] += value.detach().double() / self.config.epochs

    def evidence(
        self, rollout: Rollout, hidden: Tensor, logp: Tensor, entropy: Tensor
    ) -> CreditInputs:
        """What a credit method may read of a scored rollout."""
        return CreditInputs(
            response_ids=rollout.response_ids,
            response_mask=rollout.response_mask,
            free_mask=rollout.free_mask,
            advantages=rollout.advantages,
            rewards=rollout.rewards,
            band=self.config.band,
            step=self.step_number,
            generator=self.generator,
            sharpness=rollout.sharpness,
            source=Source(
                rollout=rollout,
                hidden=hidden.detach(),
                logp=logp.detach(),
                entropy=entropy,
                lm_head=self.lm_head.detach(),
                reward_model=self.reward_model,
                temperature=self.config.temperature,
                grad_at=self.config.grad_at,
                lookahead=self.config.lookahead,
                branches=self.config.branches,
                branch_prob=self.config.branch_prob,
            ),
        )

    @torch.no_grad()
    def reference_logp(self, rollout: Rollout) -> Tensor:
        """(B, T) log-probs under the policy RL started from, its parameters swapped in for it."""
        trained = [p.data for p in self.parameters]
        for p, reference in zip(self.parameters, self.reference, strict=True):
            p.data = reference
        try:
            micros = rollout.split(self.config.micro_batch)
            return torch.cat([self.forward(micro)[1] for micro in micros])
        finally:
            for p, data in zip(self.parameters, trained, strict=True):
                p.data = data


class Laps:
    """Seconds by phase: a call ends a lap and counts it for the phase that it names."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now


def main(argv: list[str] | None = None) -> None:
    with plain_errors():
        config = settle(parse(argv))
        folder = config.resume or config.output_dir or new_folder(config)
        config = replace(config, output_dir=folder)
        refuse_taken(config)  # before anything is loaded
        prepared = prepare(config)
        print(banner(config, prepared["policy"], prepared["reward_model"].model))
        history = train(**prepared, config=config)
        report(history, config)


if __name__ == "__main__":
    main()
