"use strict";
const root = document.documentElement, told = document.getElementById("told");

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

// The point nearest to the mouse tells its values.
for (const svg of document.querySelectorAll("svg")) {
  const points = [...svg.querySelectorAll("circle[data-told]")];
  let near = null;
  const leave = () => { near?.classList.remove("near"); near = null; told.hidden = true; };
  svg.addEventListener("mouseleave", leave);
  svg.addEventListener("mousemove", (event) => {
    let least = 40 * 40, found = null;
    for (const point of points) {
      const box = point.getBoundingClientRect();
      const away = (box.x + box.width / 2 - event.clientX) ** 2 + (box.y + box.height / 2 - event.clientY) ** 2;
      if (away < least) [least, found] = [away, point];
    }
    leave();
    if (!found) return;
    near = found;
    near.classList.add("near");
    told.textContent = near.dataset.told;
    told.hidden = false;
    told.style.left = Math.min(event.clientX + 14, innerWidth - told.offsetWidth - 8) + "px";
    told.style.top = event.clientY + 14 + "px";
  });
}
