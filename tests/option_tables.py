"""A value for every option of the algorithm at which some number must differ."""

SAMPLING = {
    "sampling.temperature": 0.3,
    "sampling.top_k": 2,
    "sampling.top_p": 0.4,
    "sampling.min_p": 0.5,
}
SCORING = {
    "ppo.gamma": 0.9,
    "ppo.lam": 0.5,
    "ppo.whiten_advantages": False,
    "ppo.logp_old": "sampler",
    "ppo.tis_cap": 1.05,
    "kl.estimator": "k2",
    "kl.estimator k3": {"kl.estimator": "k3"},
    "kl.where": "loss",
    "kl.beta": 0.5,
    "reward.missing_eos_penalty": -1.0,
    "reward.missing_eos_mode": {
        "reward.missing_eos_mode": "subtract",
        "reward.missing_eos_penalty": 1.5,
    },
    "reward.score_at": "after_eos",
    "reward.whiten": True,
    "reward.whiten after_eos": {"reward.whiten": True, "reward.score_at": "after_eos"},
    "reward.clip": 0.3,
}
LOSS = {
    "ppo.eps": 0.5,
    "ppo.eps_high": 0.5,
    "ppo.dual_clip": 1.01,
    "ppo.value_eps": None,
    "ppo.value_coef": 0.1,
    "ppo.entropy_coef": 0.3,
    "ppo.tis_cap": 1.05,
    "ppo.aggregation": "seq-mean-token-mean",
    "ppo.aggregation sum": {"ppo.aggregation": "seq-mean-token-sum"},
    "ppo.aggregation norm": {"ppo.aggregation": "seq-mean-token-sum-norm"},
    "kl.where": "loss",
    "kl.where k3": {"kl.where": "loss", "kl.estimator": "k3"},
}
OPTIM = {
    "lr": 0.05,
    "schedule": {"schedule": "linear"},
    "schedule cosine": {"schedule": "cosine"},
    "warmup": 2,
    "b1": 0.5,
    "b2": 0.5,
    "eps": 0.1,
    "weight_decay": 0.5,
    "max_grad_norm": 0.01,
}
ELSEWHERE = {
    "ppo.epochs": "the number of optimizer steps: test_ppo",
    "ppo.minibatches": "likewise",
    "ppo.batch_size": "the shape of every batch",
    "ppo.micro_batches": "must change nothing: test_ppo",
    "ppo.head_chunk": "memory only: test_logprobs",
    "kl.controller": "test_controllers_of_beta",
    "kl.target": "likewise",
    "kl.horizon": "likewise",
    "sampling.stop": "test_tokens, test_loop_data",
    "sampling.max_new_tokens": "test_decode",
    "reward.model": "test_loop",
    "reward.function": "test_rewards",
    "reward.timeout": "test_rewards",
}
SECTIONS = ("ppo", "kl", "reward", "sampling", "actor_optim", "critic_optim")


def change_of(table, name):
    """The dict of settings that stands behind a name in a table."""
    value, key = table.get(name, {}), name.split(" ")[0]
    if not isinstance(value, dict):
        return {key: value}
    prefix = key.split(".")[0] + "."
    return {k if "." in k else prefix + k: v for k, v in value.items()}
