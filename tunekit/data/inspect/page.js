"use strict";
const tip = document.getElementById("tip");
const kinds = { l: "learnt", d: "cut off", "": "context" };
let marked = null;

function hide() {
  tip.style.display = "none";
  if (marked) marked.classList.remove("on");
  marked = null;
}

function show(token) {
  hide();
  const kind = kinds[token.classList.contains("l") ? "l" : token.classList.contains("d") ? "d" : ""];
  const ids = token.getAttribute("n").split(" ");
  const named = ids.length > 1 ? "tokens " + ids.join(" ") : "token " + ids[0];
  const special = token.classList.contains("s") ? ", special" : "";
  tip.textContent = token.textContent.replace(/\n/g, "") + "\n" + named + ", place " + token.getAttribute("p") + ", " + kind + special;
  tip.style.display = "block";
  const box = token.getClientRects()[0], size = tip.getBoundingClientRect();
  const above = box.top - size.height - 6;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - size.width - 4)) + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 6) + "px";
  token.classList.add("on");
  marked = token;
}

// One listener for all: there may be a hundred thousand tokens. A tap on a phone comes as a click.
for (const event of ["mouseover", "click"])
  document.addEventListener(event, (happened) => {
    const token = happened.target.closest(".text i");
    if (token) show(token); else hide();
  });
addEventListener("scroll", hide, { passive: true });
document.getElementById("bounds").addEventListener("change", (happened) => document.body.classList.toggle("bounds", happened.target.checked));
