#!/usr/bin/env bash
# One draw of a question of docs/results/real_rows.md and its kin: makes the clients, trains all rows, and writes their
# scores into docs/results/rows. The same command continues after a crash, and trains the rows that a run file has gained.
#
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh real_rows 32 0   # 8, 32 or 72 own rows, draw 0
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh contradictions 16 0
#   BASE=FOLDER bash scripts/evidence/draw.sh shared_facts 32 0
#
# ROWS=local,fedit trains these rows alone. RATE=1e-2 tries another learning rate, into rows/QUESTION_rates.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
question="$1" own="$2" draw="$3"
base="${BASE_NAME:-$(basename "$BASE")}" words=() file="docs/results/rows/${question}_$own.jsonl"
declare -A kinds=([real_rows]=tasks [contradictions]=labels [shared_facts]=facts)
[ "$question $own" = "real_rows 72" ] && words+=(rounds=16)
out="runs/evidence/$base/$question/$own/$draw"
if [ -n "${RATE:-}" ]; then
  words+=("local.lr=$RATE" "local.lr_end=$(python3 -c "print($RATE / 10)")")
  out="$out-$RATE" file="docs/results/rows/${question}_rates.jsonl"
fi
data="runs/evidence/data/$question/$own/$draw"
[ -d "$data" ] || python scripts/default/real_rows.py "${kinds[$question]}" "$data" --rows "$own" --seed "$draw"
llm-fed compare "scripts/runs/$question.yaml" base.name="$BASE" task.path="$data" "${words[@]}" --seeds "$draw" \
  --out "$out" ${ROWS:+--methods "$ROWS"} || echo "some rows of $out are missing" >&2
flock "$file.lock" python scripts/results/kept.py "$file" --add "$out" --says "base=$base" "task=$question" \
  "own_rows=$own" "draw=$draw" ${RATE:+"rate=$RATE"}
