"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

// Users' text only goes into text nodes, so it can't inject HTML.
function el(tag, className, text, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  made.append(...children);
  return made;
}
