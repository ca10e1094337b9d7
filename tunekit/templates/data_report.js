"use strict";
const tip = document.getElementById("tip");
const kinds = { l: "target", d: "truncated", "": "context" };
let current = null;

function hide() {
  tip.style.display = "none";
  if (current) current.classList.remove("on");
  current = null;
}

function show(token) {
  hide();
  const kind = kinds[token.classList.contains("l") ? "l" : token.classList.contains("d") ? "d" : ""];
  const ids = token.getAttribute("n").split(" ");
  const idText = ids.length > 1 ? "tokens " + ids.join(" ") : "token " + ids[0];
  const special = token.classList.contains("s") ? ", special" : "";
  tip.textContent = token.textContent.replace(/\n/g, "") + "\n" + idText + ", position " + token.getAttribute("p") + ", " + kind + special;
  tip.style.display = "block";
  const box = token.getClientRects()[0], size = tip.getBoundingClientRect();
  const above = box.top - size.height - 6;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - size.width - 4)) + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 6) + "px";
  token.classList.add("on");
  current = token;
}

// One listener for all tokens: a page may have 100,000 of them. On touch screens, taps arrive as clicks.
for (const event of ["mouseover", "click"])
  document.addEventListener(event, (mouseEvent) => {
    const token = mouseEvent.target.closest(".text i");
    if (token) show(token); else hide();
  });
addEventListener("scroll", hide, { passive: true });
document.getElementById("bounds").addEventListener("change", (change) => document.body.classList.toggle("bounds", change.target.checked));
