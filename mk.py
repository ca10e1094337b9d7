import json
rows=[]
for i in range(1,61):
    ans = "" if i in (1,10,19,28,37,46,55,60) else f"It is {i} + {i}."
    rows.append({"messages":[{"role":"user","content":f"Tell me about the number {i}, please."},{"role":"assistant","content":ans}]})
rows += rows[3:10]
rows.append({"messages":[{"role":"user","content":"Tell me a long story."},{"role":"assistant","content":"Once upon a time there was a cat. It had a hat. "*4}]})
open("my_chats.jsonl","w").write("".join(json.dumps(r)+"\n" for r in rows))
open("my_lora.yaml","w").write("""recipe: sft
model: tunekit/nano
data: {kind: chat, source: my_chats.jsonl, max_length: 64, packing: true}
adapter: lora
output_dir: runs/x
""")
