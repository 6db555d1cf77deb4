# The rows of use_gpt2 and use_bert, for flags.sh, which sources this file. Their base is the model of a run of four steps
# that stopped after two.

loss='says "^val loss [0-9.]+"' e='--evaluate 1'
row --evaluate '' 1 'cat status; says "^(val loss|error: nothing to do)"' '2 error: nothing to do' '0 val loss'
row --model "$e" in/started/out "$loss" '*' '*'
row --train-data "$e" in/small/train.bin 'cat status' 0 2  # nothing beside it is to be evaluated
row --val-data "$e" $builtin/train.bin "$loss" '*' '*'
row --output '--explain a[MASK]b' other 'ls -d out other' out other
row --resume "$e @from=started -e @none" 1 "$loss" '*' '*'
row --override "$e @from=started -y 1 -e @none -t 8" 1 'cat status' 2 0
row --steps "$e" 0 'says "^(val loss|memory plan)"' 'val loss' 'memory plan'
row --batch "$e" 1 'says "[0-9]+ of [0-9]+ sequences"' "$((2 * $(D --batch))) of *" '2 of *'
row --seq-len "$e" 8 "$loss" '*' '*'
row --val-batches "$e" 1 'says "[0-9]+ of [0-9]+ micro-batches|all [0-9]+ micro-batches"' '*' '1 of *'
row --choices "$e" in/set.bin 'says "^set acc [0-9.]+"' '' 'set acc *' "$loss"
row --master-weights "$e" 0 "$loss" '*' '='  # of the checkpoint that -y 1 takes
row --loss-scale '--explain a[MASK=b]' 8 'says "^loss .*"' '*' '='  # divides out
row --threads "$e" 2 "$loss" '*' '='
row --timeout "$e" 100 "$loss" '*' '='
case $PROGRAM in
    */fp16/* | */fp32/*)
        row --fp8 "$e" 1 'cat status' 0 2
        for flag in --fp8-steps --fp8-exclude-forward; do row $flag "$e" 1 "$loss" '*' '='; done
        ;;
    *)
        row --fp8 "$e" 1 "$loss" '*' '*'
        row --fp8-steps "$e --fp8 1" 1 "$loss" '*' '='  # a model has no steps; a checkpoint has
        row --fp8-exclude-forward "$e --fp8 1" . "$loss" '*' '*'
        ;;
esac
for flag in --autotune --tf32; do  # on a GPU they may change bits
    value=0 has_row[$flag]=1
    [ $flag != --tf32 ] || value=1
    [ -n "$is_gpu" ] || row $flag "$e" $value "$loss" '*' '='
done

if [ $trainer = gpt2 ]; then
    write='--generate 60'
    row --doc-mask "$e -j in/small/train.bin" 1 "$loss" '*' '*'
    row --seed '--generate 20' 7 'text | cksum' '*' '*'
    row --generate '' 5 'cat status; says "^[0-9]+ tokens in"' 2 '0 5 tokens in'
    row --samples "$write" 3 'grep -acx -e --- stdout; says "^[0-9]+ tokens"' '0 60 tokens' '2 180 tokens'
    row --prompt "$write" static 'grep -ac ^static stdout' 0 1
    row --prompt "$write" @in/prompt 'grep -ac ^static stdout' 0 1
    row --chat '-e in/chat --generate 9' hello 'text | cksum' '*' '*'
    row --temperature "$write --prompt i" 0 'text | cksum' '*' "$(greedy | cksum)" : '< kinds'
    row --temperature "$write --prompt i" 0.02 'text | cksum' '*' '*' : '< kinds'
    row --top-k "$write --prompt i" 1 'text | cksum' '*' "$(greedy | cksum)" : '< kinds'
    row --top-p "$write --prompt i" 1e-9 'text | cksum' '*' "$(greedy | cksum)" : '< kinds'
else
    row --seed "$e -e $model" 7 "$loss" '*' '*'
    row --nsp "$e" 0 'says "next sentence"' 'next sentence' ''
    row --mask-fraction "$e" 0.5 "$loss" '*' '*'
    row --whole-word-masking "$e -i in/small/train.bin -j in/small/train.bin -b 8" 1 "$loss" '*' '*'
    row --short-sequences "$e" 0.9 "$loss" '*' '*'
    row --pack "$e" 3 "$loss" '*' '*'
    row --fill '' 'a[MASK]c' 'cat status; text' 2 '0 a*c*'
    vectors='@from=embed --embed lines'
    row --embed '@from=embed' lines 'cat status; ls *.npy; says "3 vectors of 16"' 2 '0 lines.npy 3 vectors of 16'
    row --vectors "$vectors" v.npy 'ls *.npy' lines.npy v.npy
    row --pool "$vectors" cls 'cksum lines.npy' '*' '*' 'wc -c lines.npy'
    row --explain-second '--explain a[MASK]b' 'c' 'says "^(loss|no loss)"' 'no loss' loss
    row --explain-next '--explain a[MASK]b --explain-second c' 1 'says "^loss .*"' '*' '*' 'ls out/explain'
fi
row --explain '' 'a[MASK]b' 'cat status; ls out' 2 '0 explain'
row --explain '' @in/prompt_mask 'cat status; ls out' 2 '0 explain'
row --explain-tensors '--explain a[MASK]b' 1 'ls out/explain' explain.html 'activations.safetensors explain.html*'
