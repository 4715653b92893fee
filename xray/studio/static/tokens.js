// The numbers of the token under the pointer; arrow keys go from token to token.
"use strict";

const shown = document.getElementById("tokens");
if (shown) {
  const facts = document.getElementById("token"), tokens = [...shown.children];
  let at = Math.max(0, tokens.findIndex((token) => `#${token.id}` === location.hash));
  const show = (number) => {
    tokens[at]?.classList.remove("now");
    at = number;
    tokens[at].classList.add("now");
    facts.textContent = `“${tokens[at].textContent}” ${tokens[at].title}`;
  };
  shown.addEventListener("pointerover", (event) => { const number = tokens.indexOf(event.target); if (number >= 0) show(number); });
  shown.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !tokens[at + step]) return;
    event.preventDefault();
    show(at + step);
  });
  if (location.hash && tokens.length) show(at);
}
