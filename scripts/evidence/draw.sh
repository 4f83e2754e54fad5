#!/usr/bin/env bash
# One draw of a question of docs/results: makes the clients, trains all rows, and writes their scores into
# docs/results/rows. The same command continues after a crash, and trains the rows that a run file has gained.
#
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh real_rows 32 0   # 8, 32 or 72 own rows, draw 0
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh contradictions 16 0
#   BASE=FOLDER bash scripts/evidence/draw.sh shared_facts 32 0
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh real_potara 72 0   # SELECT=last: overfitted parents
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh flan 300 0         # FedMerge's Table 3
#   LLM_FED_DATA=DATA BASE=FOLDER bash scripts/evidence/draw.sh rolebench 50 0     # 50 English roles
#
# Settings for all rows may follow (device=cuda). ROWS=local,fedit trains these rows alone. RATE=1e-2 tries another
# learning rate, into a file of its own. SCORES and WORK are other folders for the scores, and for clients and runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
question="$1" own="$2" draw="$3"
base="${BASE_NAME:-$(basename "$BASE")}" work="${WORK:-runs/evidence}" python="${PYTHON:-python}"
words=() variant='' recipe="$question" failed=0
declare -A kinds=([real_rows]=tasks [real_potara]=tasks [contradictions]=labels [shared_facts]=facts)
case "$question" in
  flan) recipe=flan_smollm2 data="$LLM_FED_DATA/flan/dataset1" ;;
  rolebench)
    recipe=flan_smollm2 data="$LLM_FED_DATA/rolebench/eng"
    words+=(task.name=rolebench "task.clients=$own" participation=0.4 eval.metric=rougeL eval.max_new_tokens=256
      eval.every=0)
    ;;
  *)
    data="$work/data/$question/$own/$draw"
    if [ ! -d "$data" ]; then
      rm -rf "$data.part"
      "$python" scripts/default/real_rows.py "${kinds[$question]}" "$data.part" --rows "$own" --seed "$draw"
      mv "$data.part" "$data" # whole or not at all
    fi
    ;;
esac
[ "$question $own" = "real_rows 72" ] && words+=(rounds=16)
[ -n "${SELECT:-}" ] && variant="_$SELECT" && words+=("eval.select=$SELECT")
[ -n "${RATE:-}" ] && variant="_$RATE" && words+=("local.lr=$RATE" "local.lr_end=$("$python" -c "print($RATE / 10)")")
out="$work/$base/$question/$own/$draw$variant"
"$python" -m llm_fed.cli compare "scripts/runs/$recipe.yaml" base.name="$BASE" task.path="$data" "${words[@]}" \
  "${@:4}" --seeds "$draw" --out "$out" ${ROWS:+--methods "$ROWS"} || failed=1 # the rows that ended are kept
flock "$work/lock" "$python" scripts/results/kept.py \
  "${SCORES:-docs/results/rows}/${question}_${own}_$base$variant.jsonl" --add "$out" --says "base=$base" \
  "task=$question" "own_rows=$own" "draw=$draw" ${RATE:+"rate=$RATE"}
exit "$failed"
