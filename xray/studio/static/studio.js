// Keys of buttons: <button data-key="1">; and the chat, whose replies are shown as text while they come.
"use strict";

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  // A second key while a verdict is on its way would be about the same question.
  if (document.querySelector("form.htmx-request")) return;
  const button = document.querySelector(`[data-key="${CSS.escape(event.key.toLowerCase())}"]:not([disabled])`);
  if (!button) return;
  event.preventDefault();
  if (button.matches("textarea")) button.focus();
  else button.click();
});

// After a verdict the next question is read from its beginning; refusals are shown where the answer would be.
document.addEventListener("htmx:afterSwap", (event) => {
  event.detail.elt.querySelector("[data-focus]")?.focus({ preventScroll: false });
});
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status >= 400) event.detail.shouldSwap = true;
});

const chat = document.getElementById("chat");
if (chat) {
  const talk = document.getElementById("talk"), stop = document.getElementById("stop");
  const messages = [];
  let running = null;

  const show = (role, text) => {
    const box = document.createElement("div"), name = document.createElement("h3"), body = document.createElement("p");
    box.className = `said ${role}`;
    name.textContent = role === "user" ? "You" : "Model";
    body.className = "text";
    body.textContent = text;
    box.append(name, body);
    talk.append(box);
    return body;
  };

  const answer = async () => {
    const body = show("assistant", "");
    running = new AbortController();
    stop.disabled = false;
    let text = "";
    try {
      const system = chat.elements.system.value.trim();
      const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
      const reply = await fetch("/chat", {
        method: "POST",
        signal: running.signal,
        headers: { "x-csrf-token": chat.elements.csrf.value, "content-type": "application/x-www-form-urlencoded" },
        body: new URLSearchParams({ messages: JSON.stringify(sent), temperature: chat.elements.temperature.value }),
      });
      const reader = reply.body.getReader(), decoder = new TextDecoder();
      for (let part; !(part = await reader.read()).done; ) {
        text += decoder.decode(part.value, { stream: true });
        body.textContent = text;
      }
      if (!reply.ok) body.classList.add("bad");
      else messages.push({ role: "assistant", content: text });
    } catch (error) {
      if (error.name !== "AbortError") { body.textContent = `${text}\n${error.message}`; body.classList.add("bad"); }
      else messages.push({ role: "assistant", content: text });
    }
    stop.disabled = true;
  };

  chat.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = chat.elements.text.value.trim();
    if (!text || !stop.disabled) return;
    chat.elements.text.value = "";
    messages.push({ role: "user", content: text });
    show("user", text);
    answer();
  });
  chat.elements.text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); chat.requestSubmit(); }
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("again").addEventListener("click", () => {
    if (!stop.disabled || messages.at(-1)?.role !== "assistant") return;
    messages.pop();
    talk.lastElementChild.remove();
    answer();
  });
}
