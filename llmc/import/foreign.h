/* Weights that only other programs read: a directory without model.safetensors, but with files of PyTorch, TensorFlow,
 * Flax or nanoGPT. They are refused with what to type to convert them. */
#ifndef LLMC_IMPORT_FOREIGN_H
#define LLMC_IMPORT_FOREIGN_H

#include "llmc/base/json.h"

// The model's class as config.json in a directory names it, else `other` (caller frees). Another class would drop heads,
// or add random heads that look like trained ones.
static inline char* foreign_class(const char* directory, const char* other) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
    Json json;
    Path path = path_of("%s/config.json", directory);
    if (!file_exists(path.text)) return xprintf("%s", other);
    json_load(&json, path.text, (size_t)1 << 26);
    const JsonNode *all = json_get(json.root, "architectures"), *first = all ? all->first : NULL;
    const char* name = all && all->type == JSON_ARRAY && first && first->type == JSON_STRING ? first->string : "";
    char* class_name = xprintf("%s", *name && strspn(name, letters) == strlen(name) ? name : other);
    json_free(&json);
    return class_name;
}

// Ends with USAGE if `source`, a directory or file that -e may name, has such weights.
static inline void foreign_refuse(const char* source) {
    static const struct {
        const char *name, *program, *version, *from;  // who wrote it; of transformers, which reads it; an argument
        const char *class_name, *config, *sizes;      // the usual class; TensorFlow 1: its configuration, a file of it
    } files[] = {{"pytorch_model.bin", "PyTorch", "", "", "CLASS"},
                 {"pytorch_model.bin.index.json", "PyTorch", "", "", "CLASS"},
                 {"tf_model.h5", "TensorFlow", " 4", ", from_tf=True", "CLASS"},
                 {"flax_model.msgpack", "Flax", " 4", ", from_flax=True", "CLASS"},
                 {"bert_model.ckpt.index", "TensorFlow 1", " 4", "", "BertForPreTraining", "Bert", "bert_config.json"},
                 {"model.ckpt.index", "TensorFlow 1", " 4", "", "GPT2LMHeadModel", "GPT2", "hparams.json"}};
    Path nano = path_of(is_directory(source) ? "%s/ckpt.pt" : "%s", source);
    const char* ending = strrchr(nano.text, '.');
    if (file_exists(path_of("%s/model.safetensors", source).text) ||
        file_exists(path_of("%s/model.safetensors.index.json", source).text))
        return;
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        Path path = path_of("%s/%s", source, files[i].name);
        if (!file_exists(path.text)) continue;
        char* arguments = files[i].config
                              ? xprintf("%s\", from_tf=True, config=transformers.%sConfig.from_json_file(\"%s/%s\")",
                                        path.text, files[i].config, source, files[i].sizes)
                              : xprintf("%s\"%s", source, files[i].from);
        die(USAGE,
            "%s: holds weights as %s writes them; write model.safetensors with transformers%s: "
            "transformers.%s.from_pretrained(\"%s).save_pretrained(NEW), and copy the tokenizer's files to NEW",
            path.text, files[i].program, files[i].version, foreign_class(source, files[i].class_name), arguments);
    }
    if (file_exists(nano.text) && ending && strcmp(ending, ".pt") == 0)
        die(USAGE, "%s: is a checkpoint of PyTorch; one of nanoGPT becomes a model by: python3 dev/import.py %s NEW",
            nano.text, nano.text);
}

#endif
