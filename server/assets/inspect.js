"use strict";
document.documentElement.classList.add("script");
const tabs = [...document.querySelectorAll(".tabs button")];
function show(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-pressed", String(other === tab));
    document.getElementById(other.dataset.panel).classList.toggle("open", other === tab);
  }
}
for (const tab of tabs) tab.addEventListener("click", () => show(tab));
if (tabs.length) show(tabs[0]);
for (const gap of document.querySelectorAll(".gap")) {
  gap.querySelector("button").addEventListener("click", () => {
    gap.nextElementSibling.hidden = false;
    gap.remove();
  });
}
