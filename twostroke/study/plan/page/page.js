"use strict";
const root = document.documentElement;

document.getElementById("theme").addEventListener("click", () => {
  const dark = (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "")) === "dark";
  root.style.colorScheme = dark ? "light" : "dark";
});

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    const command = button.previousElementSibling;
    getSelection().selectAllChildren(command);  // where there is no clipboard, the keyboard copies it
    navigator.clipboard?.writeText(command.textContent).then(() => { button.textContent = "copied"; }, () => {});
  });
}
