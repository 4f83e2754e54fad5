#!/usr/bin/env bash
# One draw of a question of docs/results/real_rows.md and its kin: makes the clients, trains all rows, and writes their
# scores into docs/results/rows. The same command continues after a crash, and trains the rows that a run file has gained.
#
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh real_rows 32 0   # 8, 32 or 72 own rows, draw 0
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh contradictions 16 0
#   BASE=FOLDER bash scripts/evidence/draw.sh shared_facts 32 0
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh real_potara 72 0   # SELECT=last: overfitted parents
#
# ROWS=local,fedit trains these rows alone. RATE=1e-2 tries another learning rate, into a file of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
question="$1" own="$2" draw="$3"
base="${BASE_NAME:-$(basename "$BASE")}" words=() variant=
declare -A kinds=([real_rows]=tasks [real_potara]=tasks [contradictions]=labels [shared_facts]=facts)
[ "$question $own" = "real_rows 72" ] && words+=(rounds=16)
[ -n "${SELECT:-}" ] && variant="_$SELECT" && words+=("eval.select=$SELECT")
[ -n "${RATE:-}" ] && variant="_$RATE" && words+=("local.lr=$RATE" "local.lr_end=$(python -c "print($RATE / 10)")")
data="runs/evidence/data/$question/$own/$draw" out="runs/evidence/$base/$question/$own/$draw$variant"
file="docs/results/rows/${question}_${own}_$base$variant.jsonl"
[ -d "$data" ] || python scripts/default/real_rows.py "${kinds[$question]}" "$data" --rows "$own" --seed "$draw"
llm-fed compare "scripts/runs/$question.yaml" base.name="$BASE" task.path="$data" "${words[@]}" --seeds "$draw" \
  --out "$out" ${ROWS:+--methods "$ROWS"} || echo "some rows of $out are missing" >&2
flock "runs/evidence/lock" python scripts/results/kept.py "$file" --add "$out" --says "base=$base" "task=$question" \
  "own_rows=$own" "draw=$draw" ${RATE:+"rate=$RATE"}
