def test_x(make_cell, completed):
    rows = completed(make_cell(steps=3, delay="lag", loss="reinforce", correction=["token_tis"], **{"model.warmup.steps": 20}))
    print([ (r["weight_mean"], r["weight_min"]) for r in rows])
