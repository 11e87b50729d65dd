// Of every visible text its contrast with what lies behind it: [ratio, needed, text], the poorest first.
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
const pen = canvas.getContext("2d", { willReadFrequently: true });

const painted = (colours) => {
  pen.clearRect(0, 0, 1, 1);
  for (const colour of ["white", ...colours]) {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
  }
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const luminance = (colour) => {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.map((value) => linear(value / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const behind = (element) => {
  const found = [];
  for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
  return found;
};
const ratio = (element, colour) => {
  const back = behind(element);
  const [one, other] = [luminance(painted(back)), luminance(painted([...back, colour]))].sort((a, b) => b - a);
  return (one + 0.05) / (other + 0.05);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
  if (element.closest(".unseen, .skip, noscript")) continue;
  const style = getComputedStyle(element);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const colour = element instanceof SVGElement ? style.fill : style.color;
  found.push([ratio(element, colour), large ? 3 : 4.5, text.slice(0, 40)]);
}
for (const field of document.querySelectorAll("input[placeholder], textarea[placeholder]"))
  if (field.checkVisibility())
    found.push([ratio(field, getComputedStyle(field, "::placeholder").color), 4.5, field.placeholder]);
return found.sort((a, b) => a[0] - b[0]);
