def test_x(make_cell, completed):
    import torch
    for eng in ("native","trl"):
        rows = completed(make_cell(steps=6, engine=eng, **{"model.warmup.steps": 100}))
        for r in rows: print([ r[k] for k in ("step","batch","reward_train","reward_val","loss","grad_norm_raw","grad_norm_applied","clip_factor","lr_applied","dist_from_start","cos_grad", "cos_update","param_norm","entropy_nats","clip_low_frac","clip_high_frac")])
