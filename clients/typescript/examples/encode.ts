// Encodes image files in one request, and prints what comes of each: node built/examples/encode.js TARGET FILE...
// ENCODER_TOKEN in the environment is the token for encoders that ask for one.
import { readFile } from "node:fs/promises";
import { ChunkState, EncoderClient, Modality, errorOfStatus } from "../src/index.js";

const [target = "127.0.0.1:50051", ...files] = process.argv.slice(2);
const client = new EncoderClient(target, { token: process.env["ENCODER_TOKEN"] ?? "" });
try {
  const items = await Promise.all(
    files.map(async (file, partIdx) => ({
      partIdx,
      modality: Modality.IMAGE,
      source: { case: "data" as const, value: await readFile(file) },
    })),
  );
  for await (const { event } of client.encode({ items }, 60_000)) {
    if (event.case === "chunk" && event.value.state === ChunkState.LAYOUT) {
      console.log(`part ${event.value.partIdx} will have ${event.value.tokenCount} rows`);
    } else if (event.case === "chunk") {
      const { shape, data } = (await client.read(event.value)).rows();
      console.log(`part ${event.value.partIdx}: ${shape.join(" x ")}, begins with ${data[0]?.toFixed(4)}`);
    } else if (event.case === "partFailed" && event.value.status) {
      console.log(`part ${event.value.partIdx} failed: ${errorOfStatus(event.value.status).reason}`);
    }
  }
} finally {
  client.close();
}
